"""Fault tolerance: heartbeats, failure diagnosis, timeouts, shutdown and fault injection."""
