"""Metrics, logs, health and the status page. Reads statistics() snapshots; decides nothing."""
