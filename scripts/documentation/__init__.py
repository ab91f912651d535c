"""What the documentation is made with: links out of its folder, and tables of records."""
