"""What a person or a program sees: text, tables, JSON and progress. The only importer of rich."""
