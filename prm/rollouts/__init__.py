"""Step labels by Monte-Carlo rollouts, in a file from which an interrupted run resumes."""
