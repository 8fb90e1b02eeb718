"""Experiments of the papers, which a checkout runs and the installed package does not hold.

Importing it adds their models and data to those of `memtrain-train`.
"""

from experiments.cifar import cifar
from experiments.fashion import fashion
from memtrain.training.data import SOURCES
from memtrain.training.networks import MODELS

MODELS["cifar"] = ("images", cifar)
SOURCES["fashion"] = fashion
