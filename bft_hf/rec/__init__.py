"""Sequential recommenders as transformers models, plain or as Bayesian filters: SASRec, BERT4Rec and HSTU."""

from transformers import AutoConfig, AutoModel

from .bert4rec import BERT4RecForMaskedItem
from .configuration import BERT4RecConfig, HSTUConfig, RecommenderConfig, SASRecConfig, filter_defaults
from .hstu import HSTUForNextItem
from .modeling_common import RecommenderModel, RecommenderOutput
from .sasrec import SASRecForNextItem

__all__ = [
    "BERT4RecConfig",
    "BERT4RecForMaskedItem",
    "HSTUConfig",
    "HSTUForNextItem",
    "RecommenderConfig",
    "RecommenderModel",
    "RecommenderOutput",
    "SASRecConfig",
    "SASRecForNextItem",
    "filter_defaults",
]

for _model in (SASRecForNextItem, BERT4RecForMaskedItem, HSTUForNextItem):
    AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
    AutoModel.register(_model.config_class, _model, exist_ok=True)
