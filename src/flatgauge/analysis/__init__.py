"""The public verbs and their records: measure, certify, compare, spectrum, landscape, Monitor.

The records that the verbs return stand in ``__init__.pyi`` and are looked up at first use.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
