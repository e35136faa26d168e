"""Environment, wiring and the training loop."""

from megatron_overlap.training.entry import main, pretrain
from megatron_overlap.training.inference import LoadedModel, load_model
from megatron_overlap.training.providers import StageContext, masked_lm_loss

__all__ = ["LoadedModel", "StageContext", "load_model", "main", "masked_lm_loss", "pretrain"]
