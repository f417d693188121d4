"""What the server answers to requests that no page would make."""

import csv
import io
import json

import numpy as np
import pytest

pytest.importorskip("dash", reason="the explorer needs dash")

from curvoscope.errors import RangeError
from curvoscope.explorer import app, downloads, security
from curvoscope.explorer.compute import curves, matrices, spectra
from curvoscope.explorer.server import listen
from curvoscope.explorer.state import State
from curvoscope.versions import versions

LOOPBACK = {"Host": "127.0.0.1:8050"}
UPDATE = "/_dash-update-component"
STATE = State(L=5, d=4, d_k=3)
PARTS = ("matrices", "curves", "spectra")


@pytest.fixture(scope="module")
def made():
    return app.make()


@pytest.fixture
def client(made):
    return made.server.test_client()


def body(made):
    """A request of Dash as the page makes it."""
    output = next(key for key in made.callback_map if "link-message.children" in key)
    names = [name.rsplit(".", 1) for name in output.strip(".").split("...")]
    return {
        "output": output,
        "outputs": [{"id": name, "property": kind} for name, kind in names],
        "inputs": [{"id": "location", "property": "search", "value": f"?{STATE.query()}"}],
        "changedPropIds": ["location.search"],
    }


def ask(client, part, query):
    """For a part of the answer to a state."""
    return client.get(f"/answer/{part}?{query}", headers=LOOPBACK)


def post(client, content, **options):
    data = json.dumps(content)
    return client.post(UPDATE, data=data, content_type="application/json", headers=LOOPBACK, **options)


def clean(answer):
    """No answer tells of the code."""
    for word in ("Traceback", 'File "', ".py", "curvoscope.explorer"):
        assert word not in answer.text
    return answer


class TestRequests:
    @pytest.mark.parametrize(
        ("query", "message"),
        [
            ("L=1000000000", "L: got 1000000000, expected a whole number from 2 to 32"),
            ("L=" + "9" * 5000, "L: got " + "9" * 40 + "…, expected a whole number from 2 to 32"),
            ("d=32&d_k=64&heads=4", "weights are more than 1536; lower d, d_k or the number of heads"),
            ("sigma=nan", "sigma: got nan, expected a number from 0.01 to 10"),
            ("sigma=inf", "sigma: got inf, expected a number from 0.01 to 10"),
            ("L=abc", "L: got abc, expected a whole number from 2 to 32"),
            ("L=", "L: got , expected a whole number from 2 to 32"),
            ("L=[[[]]]", "L: got [[[]]], expected a whole number from 2 to 32"),
            ("L=%ff%fe", "L: got"),
            ("loss=%00", "expected mse or ce"),
            ("L=abc&d=x", "d: got x, expected a whole number from 2 to 32"),
            ("%3Cscript%3Ealert(1)%3C/script%3E=1", "<script>alert(1)</script>: there is no such setting"),
            ("a=1&" * 500, "a: there is no such setting"),
        ],
        ids=lambda text: text[:20],
    )
    def test_bad_states_get_a_message_and_change_no_figure(self, client, query, message):
        for part in PARTS:
            answer = clean(ask(client, part, query))
            assert answer.status_code == 200
            assert answer.mimetype == "application/json"  # a script in it stays text
            assert list(answer.json) == ["error"]
            assert message in answer.json["error"]

    def test_states_without_numbers_get_a_message(self, client, monkeypatch):
        def overflow(state):
            raise RangeError("X", "the scores are not finite")

        monkeypatch.setattr(app.compute, "matrices", overflow)
        for part in PARTS:
            answer = clean(ask(client, part, STATE.query()))
            assert answer.status_code == 200
            assert answer.json == {"error": "X: the scores are not finite"}

    def test_other_parts_and_methods_are_refused(self, client):
        answer = clean(ask(client, "nothing", STATE.query()))
        assert answer.status_code == 404
        assert "matrices, curves, spectra" in answer.json["error"]
        assert clean(client.put("/answer/matrices", headers=LOOPBACK)).status_code == 405
        assert clean(client.post("/answer/matrices", json={}, headers=LOOPBACK)).status_code in (400, 405)

    @pytest.mark.parametrize(
        "content",
        [
            None,
            1,
            [],
            {},
            {"output": 3, "inputs": [], "changedPropIds": []},
            {"output": "no.such", "inputs": [], "changedPropIds": []},
            {"output": "restored.data", "inputs": [{"id": "location", "property": "search"}], "changedPropIds": [7]},
            {"output": "restored.data", "inputs": [1], "changedPropIds": []},
            {"output": "restored.data", "inputs": {}, "changedPropIds": []},
        ],
        ids=repr,
    )
    def test_posts_of_another_shape_are_refused(self, client, content):
        answer = clean(post(client, content))
        assert answer.status_code == 400
        assert answer.json["error"]

    def test_fields_missing_from_a_request_are_refused(self, made, client):
        whole = body(made)
        assert post(client, whole).status_code == 200
        for name in whole:
            for broken in (None, [], {}, 3, "text", [{}], [[]], [{"id": 3, "property": 3}], whole[name] * 2):
                fits = name == "changedPropIds" and broken in ([], whole[name] * 2)  # any names of properties do
                assert clean(post(client, {**whole, name: broken})).status_code == 400 or fits

    def test_text_that_is_no_json_deep_json_and_large_bodies_are_refused(self, client):
        for data, status in ((b"{", 400), (b"[" * 60000, 400), (b" " * (security.MOST_BYTES + 1), 413), (b"\xff", 400)):
            answer = clean(client.post(UPDATE, data=data, content_type="application/json", headers=LOOPBACK))
            assert answer.status_code == status
        assert clean(client.post(UPDATE, data=b"a=b", headers=LOOPBACK)).status_code in (400, 415)

    def test_the_server_lives_on(self, client):
        matrices_shown, curves_shown, spectra_shown = (ask(client, part, STATE.query()).json for part in PARTS)
        assert list(matrices_shown["figures"]) == ["attention", "functional", "hessian", "outer"]
        assert list(curves_shown["figures"]) == ["growth", "scalar"]
        assert list(spectra_shown["figures"]) == ["eigenvalues"]
        assert curves_shown["figures"]["growth"]["data.0.y"] == curves(matrices(STATE)).growth[0].tolist()
        found = matrices(STATE)
        digits = {name: float(digits) for name, (_, digits) in matrices_shown["numbers"].items()}
        assert digits == {"norm-" + "-".join(place): norm for place, norm in found.norms.items()}
        eigenvalues = spectra_shown["figures"]["eigenvalues"]["data.0.customdata"]
        assert eigenvalues == spectra(found).eigenvalues[::-1].tolist()

    def test_what_breaks_inside_is_no_traceback_outside(self, client, monkeypatch, caplog):
        def broken(state):
            raise RuntimeError("a secret of the code")

        monkeypatch.setattr(app.compute, "matrices", broken)
        answer = clean(ask(client, "matrices", STATE.query()))
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert "secret" in caplog.text  # the one who runs the server sees it

    def test_answers_stay_small(self, client):
        assert len(ask(client, "matrices", State().query()).data) < 250_000
        assert len(ask(client, "spectra", State().query()).data) < 100_000


class TestWhoMayAsk:
    @pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "localhost:8050", "[::1]:8050", "127.0.0.1"])
    def test_loopback_names_pass(self, client, host):
        assert client.get("/", headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8050", "127.0.0.1.evil.example", "10.0.0.1", "[", ""]
    )
    def test_other_names_do_not(self, client, host):
        for path in ("/", "/_dash-layout", "/answer/matrices", "/csv/norms", "/assets/explorer.js"):
            assert clean(client.get(path, headers={"Host": host})).status_code in (400, 403)

    def test_other_sites_may_not_post(self, made, client):
        content = body(made)
        answer = client.post(UPDATE, json=content, headers={**LOOPBACK, "Origin": "http://evil.example"})
        assert answer.status_code == 403
        assert (
            client.post(UPDATE, json=content, headers={**LOOPBACK, "Origin": "http://127.0.0.1:8050"}).status_code
            == 200
        )

    def test_answers_forbid_other_sources(self, client):
        headers = client.get("/", headers=LOOPBACK).headers
        assert headers["Content-Security-Policy"].startswith("default-src 'self'")
        assert headers["X-Content-Type-Options"] == "nosniff"

    def test_a_token_is_needed_everywhere_and_becomes_a_cookie(self):
        made = app.make("right-token")
        client, host = made.server.test_client(), {"Host": "192.0.2.7:8050"}
        content = body(made)
        for path in (
            "/",
            "/?token=",
            "/?token=wrong",
            "/_dash-layout",
            *(f"/answer/{part}" for part in PARTS),
            "/csv/norms",
            "/assets/explorer.js",
            "/nowhere",
        ):
            answer = clean(client.get(path, headers=host))
            assert answer.status_code == 403
            assert "right-token" not in answer.text
        assert client.post(UPDATE, json=content, headers=host).status_code == 403
        assert client.post(f"{UPDATE}?token=right-token", json=content, headers=host).status_code == 403

        first = client.get("/?L=5&token=right-token&d=4", headers=host)
        assert first.status_code == 302
        assert first.headers["Location"] == "/?L=5&d=4"
        cookie = first.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        shown = {**host, "Cookie": cookie.split(";")[0]}
        fresh = made.server.test_client(use_cookies=False)
        assert fresh.get("/", headers=shown).status_code == 200
        assert fresh.post(UPDATE, json=content, headers=shown).status_code == 200
        assert "figures" in fresh.get(f"/answer/matrices?{STATE.query()}", headers=shown).json
        assert fresh.get("/", headers={**host, "Cookie": "curvoscope-8050=wrong"}).status_code == 403


class TestDownloads:
    def table(self, client, name, state):
        answer = client.get(f"/csv/{name}?{state.query()}", headers=LOOPBACK)
        assert answer.status_code == 200
        assert answer.headers["Content-Disposition"] == f'attachment; filename="curvoscope-{name}.csv"'
        heading, *rows = csv.reader(io.StringIO(answer.text))
        source = {"seed": str(state.seed), **versions()}
        assert heading[-4:] == list(source) and rows and all(row[-4:] == list(source.values()) for row in rows)
        return heading[:-4], [row[:-4] for row in rows]

    @pytest.mark.parametrize("name", downloads.TABLES)
    def test_every_table_states_its_seed_and_its_programs(self, client, name):
        self.table(client, name, STATE.model_copy(update={"seed": 12}))

    @pytest.mark.parametrize("part", ["total", "outer", "functional"])
    def test_matrices_have_all_entries_and_digits(self, client, part):
        heading, rows = self.table(client, {"total": "hessian"}.get(part, part), STATE)
        expected = matrices(STATE).hessian
        assert heading == ["entry", *(row[0] for row in rows)]
        assert heading[1] == "Q.0" and heading[-1] == "V.15"
        found = np.array([[float(cell) for cell in row[1:]] for row in rows])
        outer, functional = expected.outer.dense().numpy(), expected.functional.dense().numpy()
        np.testing.assert_array_equal(
            found, {"outer": outer, "functional": functional, "total": outer + functional}[part]
        )

    def test_attention_norms_and_spectra(self, client):
        found, over = spectra(matrices(STATE)), curves(matrices(STATE))
        _, rows = self.table(client, "attention", STATE)
        weights = np.array([float(row[3]) for row in rows]).reshape(1, 5, 5)
        np.testing.assert_array_equal(weights, found.matrices.attention)
        _, rows = self.table(client, "norms", STATE)
        assert {tuple(row[:3]): float(row[3]) for row in rows} == found.matrices.norms
        _, rows = self.table(client, "eigenvalues", STATE)
        assert [float(row[1]) for row in rows if row[0] == "hessian"] == found.eigenvalues.tolist()
        assert sum(row[0] == "t_functional" for row in rows) == 2 * STATE.d
        _, rows = self.table(client, "growth", STATE)
        assert len(rows) == 4 * 8
        assert [float(row[4]) for row in rows[:7]] == over.growth[0].tolist()
        _, rows = self.table(client, "scalar", STATE)
        assert float(rows[-1][1]) == over.scalar[-1].bulk == found.scalar.bulk

    def test_bad_names_and_links_get_a_message(self, client):
        answer = clean(client.get("/csv/nothing", headers=LOOPBACK))
        assert answer.status_code == 404
        assert all(name in answer.json["error"] for name in downloads.TABLES)
        answer = clean(client.get("/csv/norms?L=abc&x=%3Cscript%3E", headers=LOOPBACK))
        assert answer.status_code == 400
        assert "L: got abc" in answer.json["error"]
        assert answer.mimetype == "application/json"  # a script in it stays text
        assert clean(client.get("/csv/norms?L=%ff%fe&" + "a=1&" * 200, headers=LOOPBACK)).status_code == 400


class TestPorts:
    def test_a_taken_port_is_replaced_by_a_free_one(self):
        first = listen(None, 0)
        try:
            taken = int(first.address.rsplit(":", 1)[1].strip("/"))
            second = listen(None, taken)
            second.server.server_close()
            assert second.address != first.address
            assert second.address.startswith("http://127.0.0.1:")
        finally:
            first.server.server_close()

    def test_a_host_needs_a_token_in_its_link(self):
        found = listen("127.0.0.1", 0)
        found.server.server_close()
        assert found.token and len(found.token) >= 32
        assert found.address.endswith(f"/?token={found.token}")

    def test_bad_addresses_and_ports_are_named(self):
        with pytest.raises(RangeError, match="port: got 70000"):
            listen(None, 70000)
        with pytest.raises(RangeError, match=r"host: cannot listen on 203\.0\.113\.9"):
            listen("203.0.113.9", 0)


def test_layout_asks_no_other_host(client):
    for path in ("/", "/_dash-layout"):
        assert "https://" not in client.get(path, headers=LOOPBACK).text
    assert json.loads(client.get("/_dash-layout", headers=LOOPBACK).text)
