# What the public functions return, each once.
from .certificate import Certificate as Certificate
from .comparison import Comparison as Comparison
from .landscapes import Landscape as Landscape
from .landscapes import Landscapes as Landscapes
from .measurement import Report as Report
from .memory import MemoryEstimate as MemoryEstimate
from .spectra import Spectra as Spectra
from .spectra import Spectrum as Spectrum
