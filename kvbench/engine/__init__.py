"""The engine: a physically evicting cache, its attention, one prefill that serves many cells."""
