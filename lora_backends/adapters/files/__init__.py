"""What lies on disk: folders, formats, and files of strangers read with limits."""
