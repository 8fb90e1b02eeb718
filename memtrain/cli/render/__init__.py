"""A report as tables, pictures, pages and files."""
