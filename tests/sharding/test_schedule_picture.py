"""The picture of the schedules is drawn, and its figures are printed."""

from sharding import schedule_picture


def test_draws_and_prints(tmp_path, capsys):
  path = tmp_path / "schedules.png"
  schedule_picture.main(str(path))
  assert path.read_bytes()[1:4] == b"PNG"
  lines = capsys.readouterr().out.splitlines()
  # 4 stages, 8 micro-batches: (P-1)/(M+P-1) = 3/11, and ZB-H1 3/27.
  figures = {line[8:24].strip(): float(line[24:32]) for line in lines[1:6]}
  assert figures["1f1b"] == figures["gpipe"] == 0.273
  assert figures["zero_bubble"] == 0.111
