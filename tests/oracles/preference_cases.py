"""Log-probabilities of pairs of answers, from which losses are computed."""

import numpy as np

BETAS = (0.1, 0.5)
LABEL_SMOOTHING = 0.15
LENGTHS = ((7, 3), (2, 9), (5, 5), (1, 4), (8, 6))  # chosen, rejected


def inputs() -> dict[str, np.ndarray]:
  """Token log-probabilities of policy and reference, rows of padded answers.

  Returns:
    "mask" bool [pairs, 2, T], chosen before rejected; "policy" float32
    [pairs, 2, T], 0 where there is no token; "reference" float32 [pairs, 2],
    sums over tokens.
  """
  rng = np.random.default_rng(7)
  mask = np.arange(9) < np.array(LENGTHS)[..., None]
  policy = -rng.exponential(2.0, size=mask.shape).astype(np.float32) * mask
  noise = rng.normal(0.0, 3.0, size=mask.shape[:2]).astype(np.float32)
  return {"mask": mask, "policy": policy, "reference": policy.sum(-1) + noise}
