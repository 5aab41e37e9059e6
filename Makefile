# make demo: sets up everything and runs a language model whose rotations run as WGSL kernels.
# make test: sets up everything and passes the tests.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test driver

demo: $(VENV)/demo driver
	$(BIN)/python -m jax_rope demo

test: $(VENV)/test driver
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(PYTEST)

# A virtual environment with the package and one extra.
$(VENV)/%: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	touch $@

# The tests run the demo.
$(VENV)/test: $(VENV)/demo

# On Linux without a Vulkan driver: Mesa's software driver, where apt and the rights for it exist.
HAS_VULKAN = $(BIN)/python -c "import jax_rope, sys; sys.exit(all(a.backend == 'OpenGL' for a in jax_rope.adapters()))"
driver: $(VENV)/demo
	@if [ "$$(uname)" != Linux ] || $(HAS_VULKAN) 2>/dev/null; then exit 0; fi; \
	root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
	if command -v apt-get >/dev/null && $$root true 2>/dev/null; then \
		echo "no Vulkan driver was found: installing mesa-vulkan-drivers"; \
		$$root apt-get update -qq && $$root env DEBIAN_FRONTEND=noninteractive \
			apt-get install -qq --no-install-recommends mesa-vulkan-drivers >/dev/null; \
	else \
		echo "no Vulkan driver was found, and this user cannot install one: install the GPU's, or Mesa's software driver"; \
		echo "(Debian and Ubuntu: sudo apt-get install mesa-vulkan-drivers; Fedora: sudo dnf install mesa-vulkan-drivers)"; \
	fi
