"""The demo: a real model, or a tiny one, answers with many adapters from room for four."""
