"""megatron-core, imported in one place, quietly and without loading a compiler.

It decorates helpers with ``torch.compile``, whose import takes as long as all the rest; in our ranks they stay plain
functions. It warns where Transformer Engine is absent, and a notebook would store that.
"""

import warnings
from unittest import mock

with warnings.catch_warnings(), mock.patch("torch.compile", lambda fn, *_, **__: fn):
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state as parallel_state
