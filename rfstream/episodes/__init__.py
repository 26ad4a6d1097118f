"""Robotics episodes: LeRobot v3 datasets, streamed as they lie on disk."""
