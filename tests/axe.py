"axe-core, which finds what keeps people from using a page who cannot see it or see little."

from functools import cache
from importlib.resources import files


@cache
def axe_script(): return files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


def serious_faults(page, within="document", without=()):
    "A line for each rule of axe-core, of impact serious or critical, that elements of a page break; with some of the elements."
    if not page.evaluate("typeof axe === 'object'"): page.evaluate(axe_script())
    options = dict(resultTypes=["violations"], rules={rule: dict(enabled=False) for rule in without})
    found = page.evaluate(f"options => axe.run({within}, options).then(r => r.violations)", options)
    places = lambda fault: "; ".join(str(node["html"])[:160] + " " + node["failureSummary"].splitlines()[-1].strip() for node in fault["nodes"][:4])
    return [f"{f['id']} ({f['impact']}, {len(f['nodes'])}): {places(f)}" for f in found if f["impact"] in ("serious", "critical")]
