"""`python -m a3b_gguf` is `a3b`."""

from a3b_gguf.cli import main

if __name__ == "__main__":
    main()
