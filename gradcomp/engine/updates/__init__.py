"""The exchange of updates: around the steps of the user's own optimizer."""
