"""Metrics, logs, health and the status page. They read the parts' statistics and change nothing."""
