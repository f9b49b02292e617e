"""What measurements share: where they were made, and how they are written down."""
