"""What a call does, looked at: explain, work, profile, weights and pictures."""
