"""Runs a Hugging Face decoder on one ragged row of many requests' tokens."""
