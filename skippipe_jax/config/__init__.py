"""Configuration of a run: frozen sections, parsing, and checks on resume.

Imports no JAX.
"""

from skippipe_jax.config.cluster import ClusterConfig
from skippipe_jax.config.data import DataConfig, DocumentSource, MixtureConfig
from skippipe_jax.config.hardware import NetworkConfig, NodeConfig, NodeMesh
from skippipe_jax.config.model import PRESETS, ModelConfig, RopeScaling, StagePartition
from skippipe_jax.config.optimizer import AveragingConfig, OptimizerConfig
from skippipe_jax.config.parsing import load_config, parse_config, to_tree, to_yaml
from skippipe_jax.config.resume import require_same_run
from skippipe_jax.config.run import (
    NO_RECIPE,
    CheckpointConfig,
    Config,
    LogConfig,
    Phase,
    PlanConfig,
    RecipeConfig,
    TrainConfig,
    ValidationConfig,
)

__all__ = [
    "NO_RECIPE",
    "PRESETS",
    "AveragingConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DocumentSource",
    "LogConfig",
    "MixtureConfig",
    "ModelConfig",
    "NetworkConfig",
    "NodeConfig",
    "NodeMesh",
    "OptimizerConfig",
    "Phase",
    "PlanConfig",
    "RecipeConfig",
    "RopeScaling",
    "StagePartition",
    "TrainConfig",
    "ValidationConfig",
    "load_config",
    "parse_config",
    "require_same_run",
    "to_tree",
    "to_yaml",
]
