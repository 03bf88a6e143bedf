"""The engine, its scheduler, and HTTP in front of it."""
