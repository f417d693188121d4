"""The picture at the top of the README shows the numbers of the gallery."""

from gallery import overview


def test_the_picture_shows_the_stored_norms():
    found = overview.stored()
    figure = overview.picture(found)
    assert overview.PICTURE.is_file() and list(found) == ["trained", "random"]
    for panel, (key, facts) in zip(figure.axes, found.items(), strict=False):
        shown = panel.images[0].get_array()
        assert panel.get_title(loc="left") == f"{key} weights, loss {facts['loss']:.2f}"
        assert [text.get_text() for text in panel.get_yticklabels()] == list(overview.ROLES.values())
        for row, role in enumerate(overview.ROLES):
            for layer in range(30):
                assert shown[row, layer] == facts["blocks"][f"h.{layer}.{role}"]["norm"]["value"]


def test_the_caption_of_the_picture_is_true():
    blocks = {key: facts["blocks"] for key, facts in overview.stored().items()}

    def quotients(key):
        norm = {name: numbers["norm"]["value"] for name, numbers in blocks[key].items()}
        return sorted(norm[f"h.{layer}.attn.V"] / norm[f"h.{layer}.attn.Q"] for layer in range(30))

    assert min(quotients("random")) > 185 and sum(one < 1 for one in quotients("trained")) == 8
    trained = {name: numbers["norm"] for name, numbers in blocks["trained"].items()}
    layers = [(trained[f"h.{layer}.attn.V"], trained[f"h.{layer}.attn.Q"]) for layer in range(30)]
    assert sum(value["high"] < query["low"] for value, query in layers) == 6
