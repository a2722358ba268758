from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY, build
from test_policy_quality import place

from experiments.kept_raster import image_of, main, rasters, text_of
from sinkcache.policies import H2O, TOVA, AdaKV, StreamingLLM, Window
from sinkcache.policies.clairvoyant import Clairvoyant
from sinkcache.recording import record

pytest.importorskip("matplotlib")

__all__ = ["place"]  # a fixture


def command(place: Path, out: Path, *more: str) -> list[str]:
    plain = ["--model", str(place / "model"), "--text", str(place / "one.txt"), "--tokens", "64", "--chunk", "4"]
    return [*plain, "--budget", "16", "--policy", "Window,H2O", "--out", str(out), *more]


def drawn(policy: Any, budget: int = 8, chunk: int = 4, length: int = 30, places: Any = ((0, 0),)) -> Any:
    ids = torch.randint(0, VOCABULARY, (1, length))
    return rasters(build("llama"), ids, policy, budget, chunk, places)


def test_a_raster_says_what_is_held_after_each_chunk() -> None:
    raster = drawn(StreamingLLM(2))[0, 0]
    for step, read in enumerate([4, 8, 12, 16, 20, 24, 28, 30]):
        held = list(range(read)) if read <= 8 else [0, 1, *range(read - 6, read)]
        assert raster[step].nonzero()[:, 0].tolist() == held


def test_layers_and_heads_are_drawn_apart() -> None:
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    by_place = drawn(H2O(recent=2), places=places)
    assert list(by_place) == places
    assert len({tuple(raster.flatten().tolist()) for raster in by_place.values()}) == 4
    assert all((raster[-1].sum() == 8) for raster in by_place.values())


def test_heads_that_hold_fewer_are_drawn_with_what_they_hold() -> None:
    by_place = drawn(AdaKV(TOVA("head"), floor=0.2), places=[(0, 0), (0, 1)])
    one, other = (raster[-1].sum() for raster in by_place.values())
    assert one + other == 16
    assert one != other


def test_a_clairvoyant_is_drawn_too(model) -> None:
    ids = torch.randint(0, VOCABULARY, (1, 30))
    policy = Clairvoyant(record(model("llama"), ids, 4))
    assert rasters(model("llama"), ids, policy, 8, 4, [(1, 1)])[1, 1][-1].sum() == 8


@pytest.mark.parametrize(("place_", "said"), [((2, 0), "2 layers, got layer 2"), ((0, 2), "2 key heads, got head 2")])
def test_a_place_that_is_not_there_is_an_error(place_: tuple[int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        drawn(Window(), places=[place_])


def test_a_window_is_a_band_and_sinks_are_a_floor() -> None:
    window, sinks = (drawn(policy, 8, 4, 32)[0, 0] for policy in (Window(), StreamingLLM(4)))
    assert text_of(window, 4, 13, 8).splitlines() == [
        "  32        █",
        "           ██",
        "          ██·",
        "         ██··",
        "        ██···",
        "       ██····",
        "      ██·····",
        "   0 ██······",
        "read 4     32",
    ]
    assert text_of(sinks, 4, 13, 8).splitlines()[-3:] == ["      █······", "   0 ████████", "read 4     32"]


@pytest.mark.parametrize(
    ("held", "shade"), [(0, "·"), (1, "░"), (2, "░"), (3, "▒"), (8, "▒"), (9, "▓"), (15, "▓"), (16, "█")]
)
def test_a_shade_says_how_much_is_held(held: int, shade: str) -> None:
    raster = torch.zeros(1, 16, dtype=torch.bool)
    raster[:, :held] = True
    assert text_of(raster, 16, 6, 1).splitlines()[0][-1] == shade


def test_what_was_not_read_yet_is_blank_and_does_not_dilute() -> None:
    raster = torch.ones(2, 8, dtype=torch.bool).tril(diagonal=3)
    raster[1] = True
    assert text_of(raster, 4, 7, 1).splitlines()[0].endswith("██")


@pytest.mark.parametrize(("steps", "width"), [(3, 77), (32, 69), (73, 78), (500, 78)])
def test_a_picture_fits_a_terminal_and_steps_are_alike_where_there_is_room(steps: int, width: int) -> None:
    lines = text_of(torch.ones(steps, 4096, dtype=torch.bool), 4096).splitlines()
    assert max(len(line) for line in lines) == width
    assert len(lines) == 17


def test_an_image_has_a_panel_for_each_title() -> None:
    panels = {str(index): drawn(Window(), length=30)[0, 0] for index in range(4)}
    figure = image_of(panels, 4)
    assert [axes.get_title() for axes in figure.axes] == [*panels]
    picture = figure.axes[0].images[0].get_array()
    assert picture.shape == (30, 8)
    assert (picture > 0.99).sum(axis=0).tolist() == [4, *[8] * 7]
    assert (picture == 0).sum(axis=0).tolist() == [26, 22, 18, 14, 10, 6, 2, 0]


def test_few_tokens_of_many_are_still_to_be_seen_in_an_image() -> None:
    raster = torch.zeros(2, 8192, dtype=torch.bool)
    raster[:, :4] = True
    picture = image_of({"sinks": raster}, 4096).axes[0].images[0].get_array()
    assert picture.shape == (256, 2)
    assert picture[0, 1] > 4 * picture[1, 1] > 0


def test_the_command_prints_and_draws(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "deep" / "raster.png"
    assert main(command(place, out, "--layer", "0,1", "--head", "1", "--policy", "Window,Clairvoyant")) == 0
    printed = capsys.readouterr().out
    for name in ("Window", "Clairvoyant"):
        for layer in (0, 1):
            assert f"{name}, layer {layer}, head 1, budget 16" in printed
    assert max(len(line) for line in printed.splitlines() if "raster.png" not in line) <= 80
    assert out.stat().st_size > 5_000


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--policy", "H3O"], "'H3O' is none of"),
        (["--policy", "SnapKV"], "with budget=16"),
        (["--budget", "64"], "evicts nothing from --tokens 64"),
        (["--layer", "2"], "2 layers, got layer 2"),
        (["--head", "2"], "2 key heads, got head 2"),
    ],
)
def test_a_users_mistake_is_one_line(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture, more: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(command(place, tmp_path / "a.png", *more))
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
