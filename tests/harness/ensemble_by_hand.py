"""The formulas of an ensemble as plain loops in float64, over products that never underflow."""

from __future__ import annotations

import numpy as np


def softmax(logs: np.ndarray) -> np.ndarray:
    exponentials = np.exp(logs - logs.max())
    return exponentials / exponentials.sum()


def log_of_mean(logs: np.ndarray, weights: np.ndarray) -> float:
    greatest = logs.max()
    return float(np.log(np.sum(weights * np.exp(logs - greatest))) + greatest)


def posteriors(log_p: np.ndarray, prior: np.ndarray, resets: np.ndarray) -> np.ndarray:
    """Of one sequence [expert position], with one row more: after the last target."""
    found = []
    passed = np.zeros(len(log_p))
    for place in range(log_p.shape[1]):
        if resets[place]:
            passed = np.zeros(len(log_p))
        found.append(softmax(np.log(prior) + passed))
        passed = passed + log_p[:, place]
    found.append(softmax(np.log(prior) + passed))
    return np.array(found)


def priors_of(log_p: np.ndarray, resets: np.ndarray, decay: float) -> np.ndarray:
    """The updating prior of each sequence, and after the last, by the papers' sum."""
    experts, sequences, _ = log_p.shape
    found, finals = [], []
    for sequence in range(sequences + 1):
        weights = [decay ** (sequence - i) * (1 - decay) / decay for i in range(sequence)]
        prior = decay**sequence / experts + sum(
            (w * final for w, final in zip(weights, finals, strict=True)), np.zeros(experts)
        )
        found.append(prior)
        if sequence < sequences:
            finals.append(posteriors(log_p[:, sequence], prior, resets[sequence])[-1])
    return np.array(found)


def mixed(
    log_p: np.ndarray, resets: np.ndarray, priors: np.ndarray, how: str = "posterior"
) -> np.ndarray:
    """Log-probability of each target; `priors` are one for each sequence."""
    _, sequences, positions = log_p.shape
    found = np.zeros((sequences, positions))
    for sequence in range(sequences):
        prior = priors[sequence]
        by_place = posteriors(log_p[:, sequence], prior, resets[sequence])
        for place in range(positions):
            w = prior if how == "prior" else by_place[place]
            if how == "top-1":
                w = (w >= w.max() * (1 - 1e-12)).astype(float)
                w /= w.sum()
            found[sequence, place] = log_of_mean(log_p[:, sequence, place], w)
    return found
