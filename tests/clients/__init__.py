"""Other people's clients against the running server. They parse strictly in their own way, and are what users have."""
