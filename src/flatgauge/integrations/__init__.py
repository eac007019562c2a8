"""A `flatgauge.Monitor` in the hands of others' training loops, one file each.

Nothing here is imported before it is asked for: ``from flatgauge.integrations.lightning import
MonitorCallback``, or ``from flatgauge.integrations.huggingface import MonitorCallback``.
"""
