"""What a stage kept and what it removed, and why."""

import dataclasses


@dataclasses.dataclass
class Report:
  """Counts of one stage of data preparation.

  Attributes:
    stage: name of the stage.
    kept: documents that passed.
    removed: reason -> ids of the documents removed for it, in input order.
    notes: (what happened -> how often) of documents that were changed or of
      lines that never became documents.
  """

  stage: str
  kept: int = 0
  removed: dict[str, list[str]] = dataclasses.field(default_factory=dict)
  notes: dict[str, int] = dataclasses.field(default_factory=dict)

  def keep(self) -> None:
    self.kept += 1

  def remove(self, reason: str, document_id: str) -> None:
    self.removed.setdefault(reason, []).append(document_id)

  def note(self, what: str, times: int = 1) -> None:
    self.notes[what] = self.notes.get(what, 0) + times

  @property
  def num_removed(self) -> int:
    return sum(map(len, self.removed.values()))

  def __str__(self) -> str:
    """One line for the stage, one for each reason with an example."""
    seen = self.kept + self.num_removed
    lines = [
      f"{self.stage}: {seen:,} documents in, {self.kept:,} kept,"
      f" {self.num_removed:,} removed"
    ]
    for reason, ids in sorted(self.removed.items(), key=lambda x: -len(x[1])):
      lines.append(f"  {len(ids):>8,}  {reason} (such as {ids[0]})")
    for what, times in sorted(self.notes.items()):
      lines.append(f"  {times:>8,}  {what}")
    return "\n".join(lines)

  def as_dict(self) -> dict:
    """Everything, ids included, ready for JSON."""
    return dataclasses.asdict(self)
