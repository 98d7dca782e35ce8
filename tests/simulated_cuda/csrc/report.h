// What Python is told. None of these functions may be called with a lock held: they take the interpreter's.
#pragma once

#include <functional>
#include <string>

namespace simulated {

// Kinds: "race", "lifetime", "pinned" and "mismatch" are faults; "sync", "pageable" and "collective" are counted.
void report(const std::string& kind, const std::string& text);

// Returns where Python is, innermost frame first; "" unless places are asked for.
std::string place();
std::string place_if_traced();

// Calls a function without the interpreter's lock, for waits.
void without_interpreter(const std::function<void()>& function);

}  // namespace simulated
