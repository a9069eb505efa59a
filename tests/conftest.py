"""Being here puts this folder on the path, so that tests in subfolders import its models and toys."""
