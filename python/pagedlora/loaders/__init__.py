"""From the files that people have to what the cache can load."""
