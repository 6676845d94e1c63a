"""What a `LoraManager` keeps: names, generations, the requests that use them, and their pins."""
