"""What is saved, loaded, and handed on to another spec or to other ranks."""
