"""Safetensors to tensors and metadata in GGUF's terms."""
