"""Bytes of a loaded model: what its file says, where its layers go, and each term by the formula that llama.cpp uses."""
