"""The plan: pure functions of integers. Imports nothing of Ray or torch."""
