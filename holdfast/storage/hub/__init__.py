"""Repositories of a Hugging Face hub: reading needs no other package, pushing needs huggingface_hub."""
