"""Who can see what: the words for each kind of hop, and the endpoint."""

from __future__ import annotations

from mesh.api.privacy import Exposure, Precautions, ReportedRoute, Sight, expose, report
from mesh.types import LayerRange, ModelId

NOTHING = Precautions(0, 0, 0.0, 0.0)


def hop(
    name: str, layers: str, *, is_own: bool, is_checkable: bool = True, noisy: bool = False
) -> Exposure:
    span = LayerRange.parse(layers)
    return expose(name, span, 16, is_own=is_own, is_checkable=is_checkable, noisy=noisy)


def sight(layers: str, *, is_own: bool = False, noisy: bool = False) -> Sight:
    return hop("barn", layers, is_own=is_own, noisy=noisy).sight


def test_what_a_hop_sees_depends_on_its_layers() -> None:
    assert sight("0-3") is Sight.EXACT
    assert sight("0-3", noisy=True) is Sight.BLURRED
    assert sight("4-11") is Sight.RECOVERABLE
    assert sight("12-15") is Sight.EXACT
    assert sight("12-15", noisy=True) is Sight.EXACT  # the head is public, noise or not
    assert sight("0-15", noisy=True) is Sight.EXACT
    assert sight("0-15", is_own=True) is Sight.OWN


def route(*hops: Exposure, missing: str = "") -> ReportedRoute:
    return ReportedRoute(ModelId("tiny"), None, hops, missing)


def test_the_words_name_every_machine_and_every_precaution() -> None:
    away = hop("barn", "0-15", is_own=False)
    found = report([route(away)], Precautions(2, 0, 0.25, 0.01))
    words = "\n".join(found["words"])
    assert "layers 0-15 on barn: can tell every token" in words
    assert "For 1 % of the steps" in words
    assert "Layers that always run here: the first 2." in words
    assert "Noise of 0.25" in words
    assert list(found["routes"][0]["hops"]) == [
        {"node": "barn", "layers": "0-15", "sight": "exact", "is_checkable": True}
    ]
    assert "nobody but" not in words


def test_what_no_other_machine_can_check_is_named() -> None:
    alone = route(hop("barn", "0-15", is_own=False, is_checkable=False))
    for precautions, said in (
        (NOTHING, "nobody but barn holds all of these: nobody can check what it answers."),
        (Precautions(0, 0, 0.0, 0.01, 256), "is checked only if a copy fits here (256 MiB, spot_"),
    ):
        assert said in "\n".join(report([alone], precautions)["words"])
    own = route(hop("sofa", "0-15", is_own=True, is_checkable=False))
    assert "nobody but" not in "\n".join(report([own], NOTHING)["words"])


def test_at_home_nothing_is_said_of_other_machines() -> None:
    home = hop("sofa", "0-15", is_own=True)
    words = "\n".join(report([route(home)], Precautions(0, 0, 0.0, 0.01))["words"])
    assert "nobody else sees these" in words
    assert "another" not in words.replace("No other machine", "")


def test_no_route_says_why() -> None:
    words = report([route(missing="no node serves layers 3-4.")], NOTHING)["words"]
    assert "  no route: no node serves layers 3-4." in words
