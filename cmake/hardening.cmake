# Flags that make a mistake in C++ harder to exploit, as far as the compiler and the linker have them.
# Included before any target is made, so nanobind's part of the module has them as well.
# docs/native.md says what each is for, tests/unit/test_hardening.py looks at the module.
include(CheckCXXCompilerFlag)
include(CheckCXXSourceCompiles)
include(CheckLinkerFlag)

# Older Clangs take flags of other processors, and warn: that is a no.
set(CMAKE_REQUIRED_FLAGS -Werror)
foreach(flag -fstack-protector-strong -fstack-clash-protection -fcf-protection=full -mbranch-protection=standard)
  string(MAKE_C_IDENTIFIER "HAS${flag}" known)
  check_cxx_compiler_flag(${flag} ${known})
  if(${known})
    add_compile_options(${flag})
  endif()
endforeach()
unset(CMAKE_REQUIRED_FLAGS)

# The C library warns where the compiler has no level 3. Without optimization there is none at all.
set(CMAKE_REQUIRED_FLAGS "-O2 -Werror -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3")
check_cxx_source_compiles("#include <cstring>\nint main() {}" HAS_FORTIFY_3)
unset(CMAKE_REQUIRED_FLAGS)
set(fortify -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$<IF:$<BOOL:${HAS_FORTIFY_3}>,3,2>)
add_compile_options("$<$<NOT:$<CONFIG:Debug>>:${fortify}>")

foreach(flag -Wl,-z,relro -Wl,-z,now -Wl,-z,noexecstack)
  string(MAKE_C_IDENTIFIER "HAS${flag}" known)
  check_linker_flag(CXX ${flag} ${known})
  if(${known})
    add_link_options(${flag})
  endif()
endforeach()
