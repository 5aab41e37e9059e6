# make demo: sets up everything and runs a language model whose rotations run as WGSL kernels.
# make test: sets up everything and passes the tests; FAST=1 leaves out those that take longest.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test driver others browser

demo: $(VENV)/demo driver
	$(BIN)/python -m jax_rope demo

test: $(VENV)/test driver others browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m "$(if $(FAST),not slow and not soak and )$(WITHOUT)not alone"
	$(if $(FAST),,$(BIN)/python -m pytest -m alone)

# A virtual environment with the package and one extra.
$(VENV)/%: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

# The tests run the demo.
$(VENV)/test: $(VENV)/demo

HAS_VULKAN = $(BIN)/python -c "import jax_rope, sys; sys.exit(all(a.backend == 'OpenGL' for a in jax_rope.adapters()))"
HAS_OPENGL = $(BIN)/python -c "import jax_rope, sys; sys.exit(all(a.backend != 'OpenGL' for a in jax_rope.adapters()))"

# Installs packages, where apt and the rights for it exist.
INSTALL = root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; command -v apt-get >/dev/null && $$root true 2>/dev/null && \
	echo "installing $(1)" && $$root apt-get update -qq && $$root env DEBIAN_FRONTEND=noninteractive \
	apt-get install -qq --no-install-recommends $(1) >/dev/null

# On Linux without a Vulkan driver: Mesa's software driver.
driver: $(VENV)/demo
	@if [ "$$(uname)" != Linux ] || $(HAS_VULKAN) 2>/dev/null; then exit 0; fi; \
	echo "no Vulkan driver was found"; \
	if ! { $(call INSTALL,mesa-vulkan-drivers); }; then \
		echo "this user cannot install one: install the GPU's, or Mesa's software driver"; \
		echo "(Debian and Ubuntu: sudo apt-get install mesa-vulkan-drivers; Fedora: sudo dnf install mesa-vulkan-drivers)"; \
	fi

# Two more adapters, for the tests that are marked so: Mesa's OpenGL, and SwiftShader. Where one cannot be had those
# tests are left out, but for CI, where they fail.
others: $(VENV)/test driver
	@$(HAS_OPENGL) 2>/dev/null || { $(call INSTALL,libegl1 libgl1-mesa-dri); } || echo "there is no OpenGL adapter here"
	@$(BIN)/python tests/swiftshader.py || true

WITHOUT = $(if $(CI),,$$([ -e .cache/swiftshader/driver.json ] && $(HAS_OPENGL) 2>/dev/null || echo "not adapters and "))

# Chromium, for the tests that are marked so; left out likewise.
browser:
	@$(HAS_BROWSER) || { $(call INSTALL,chromium); } || echo "there is no Chromium here"

HAS_BROWSER = (for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	command -v $$name >/dev/null && exit; done; false)
WITHOUT += $(if $(CI),,$$( $(HAS_BROWSER) || echo "not browser and "))
