# Answers GET /C%3A/folder/file.txt with the bytes of that file, 404 if it does not exist, 403 if access is denied, and
# GET / with a fixed text.
$ErrorActionPreference = 'Stop'
$listener = New-Object System.Net.HttpListener
$listener.Prefixes.Add('http://+:9999/')
$listener.Start()
while ($listener.IsListening) {
    $context = $listener.GetContext()
    $response = $context.Response
    try {
        $path = [Uri]::UnescapeDataString($context.Request.Url.AbsolutePath).TrimStart('/')
        if ($path -eq '') {
            $bytes = [Text.Encoding]::ASCII.GetBytes("osworld-files`n")
        } elseif (-not (Test-Path -LiteralPath $path -PathType Leaf)) {
            $response.StatusCode = 404
            $bytes = [byte[]]@()
        } else {
            # Shared, so that a file that a program still has open can be read.
            $file = [IO.File]::Open($path, 'Open', 'Read', 'ReadWrite, Delete')
            try {
                $memory = New-Object IO.MemoryStream
                $file.CopyTo($memory)
                $bytes = $memory.ToArray()
            } finally { $file.Close() }
        }
        $response.ContentLength64 = $bytes.Length
        $response.OutputStream.Write($bytes, 0, $bytes.Length)
    } catch [UnauthorizedAccessException] {
        $response.StatusCode = 403
    } catch {
        $response.StatusCode = 500
    } finally {
        try { $response.Close() } catch { }
    }
}
