"""megatron-core, imported in one place: without its warnings that Transformer Engine is absent, and without the
``torch.compile`` of its helpers, whose import takes as long as all the rest; in our ranks they stay plain functions.
"""

import warnings
from unittest import mock

from refimpl import recorder

recorder.operators()  # here, since the fork server imports this file once for all ranks

with warnings.catch_warnings(), mock.patch("torch.compile", lambda fn, *_, **__: fn):
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state as parallel_state
    from megatron.core.models.gpt import GPTModel as GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec as get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig as TransformerConfig
