"""Turns a run's events into one HTML page that needs nothing else: no network, no framework, no tensor.

`history`, `layer_history` and `incidents` read the events, `page` puts the sections together.
"""
