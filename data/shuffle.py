"""A permutation of range(n) that is computed, not stored."""

import numpy as np

_ROUNDS = 6
# Up to so many indices are walked one by one: numpy takes as long for one as
# for a thousand, and a loader asks for the rows of one batch.
_FEW = 24
_WORD = 2**64 - 1


def mix(x: np.ndarray) -> np.ndarray:
  """A bijection of uint64 that scatters neighbours (splitmix64's finaliser)."""
  x = np.atleast_1d(np.asarray(x, np.uint64))
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))


def key(*parts: int | np.ndarray) -> np.ndarray:
  """Mixes integers (seed, source, epoch, ...) into one uint64 key each."""
  out = np.zeros(1, np.uint64)
  for part in parts:
    part = np.asarray(part)
    if part.dtype == object or part.ndim == 0:  # any Python int
      part = np.uint64(int(part) % 2**64)
    out = mix(out * np.uint64(3) + part.astype(np.uint64) + np.uint64(1))
  return out


def permute(index: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
  """Where a random permutation of range(n) sends each index.

  A Feistel network on the smallest even number of bits that covers n, walked
  until the value falls below n (Black and Rogaway, "Ciphers with arbitrary
  finite domains", 2002). O(1) memory, and the same values in every version of
  numpy, which its own generators do not promise.

  Args:
    index: int64, in [0, n).
    n: size of the permuted range.
    keys: uint64, one for all or one for each index; another key, another
      permutation.

  Returns:
    int64 of the shape of `index`.
  """
  index = np.atleast_1d(np.asarray(index, np.int64))
  assert n > 0 and (index.size == 0 or 0 <= index.min() <= index.max() < n)
  half = np.uint64(max(1, (int(n - 1).bit_length() + 1) // 2))
  low = np.uint64((1 << int(half)) - 1)
  keys = np.broadcast_to(np.atleast_1d(keys), index.shape)
  if index.size <= _FEW:
    pairs = zip(index.ravel().tolist(), keys.ravel().tolist(), strict=True)
    images = [_walk(i, n, key, int(half)) for i, key in pairs]
    return np.array(images, np.int64).reshape(index.shape)
  value = index.astype(np.uint64)
  todo = np.arange(index.size)
  while todo.size:
    left, right = value[todo] >> half, value[todo] & low
    for i in range(_ROUNDS):
      noise = mix(mix(right + keys[todo]) + np.uint64(i + 1))
      left, right = right, left ^ (noise & low)
    value[todo] = (left << half) | right
    todo = todo[value[todo] >= np.uint64(n)]
  return value.astype(np.int64)


def _walk(value: int, n: int, key: int, half: int) -> int:
  """`permute` of one index, on Python's integers."""
  low = (1 << half) - 1
  while True:
    left, right = value >> half, value & low
    for i in range(_ROUNDS):
      noise = _mix(_mix((right + key) & _WORD) + i + 1 & _WORD)
      left, right = right, left ^ (noise & low)
    value = left << half | right
    if value < n:
      return value


def _mix(x: int) -> int:
  """`mix` of one integer below 2 ** 64."""
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
  return x ^ (x >> 31)
