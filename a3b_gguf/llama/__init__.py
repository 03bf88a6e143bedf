"""The only door to llama_cpp and its ggml library. Importing this package loads neither; its modules do."""
