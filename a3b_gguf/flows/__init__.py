"""Where siblings meet: what a command does from end to end, without printing anything."""
