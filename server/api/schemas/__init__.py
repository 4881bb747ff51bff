"""What requests may hold, checked before anything is tokenised."""
