"""Weights of Hugging Face's libraries."""
