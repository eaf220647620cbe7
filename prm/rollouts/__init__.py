"""Step labels by Monte-Carlo rollouts, in a file that a stopped run continues."""
