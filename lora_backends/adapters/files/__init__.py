"""Files on disk: folders, formats, and readers with limits for files that nobody vouches for."""
